"""The expert axis: routing, dispatch, experts in parallel, balance."""
