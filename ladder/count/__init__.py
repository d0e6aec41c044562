"""What counts: FLOPs, bytes, floors, cards, memory."""
