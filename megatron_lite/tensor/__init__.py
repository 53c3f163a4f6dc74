"""The tensor axis: column/row-parallel linears, vocabulary embedding and cross-entropy."""
