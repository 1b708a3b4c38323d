"""The fallback where the native engine cannot be built: one training step in so many, under the dispatch engine."""
