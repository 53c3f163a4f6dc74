"""The Transformer: embedding, blocks, head, built from the specs of this rank."""
