"""What counts. Engines only count; labelers only classify."""
