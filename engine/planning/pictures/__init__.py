"""Memory of the encoder of pictures beside a model."""
