"""Pictures in conversations: what reads, places and encodes them for one model."""
