"""What names. Labelers only classify: they tell the engine whose the next bytes are, and correct what it booked."""
