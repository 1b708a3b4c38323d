"""What crosses from a training process to the sidecar; torch-free."""
