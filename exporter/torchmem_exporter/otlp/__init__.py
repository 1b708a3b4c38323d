"""OTLP: blocks of points encoded as protobuf and pushed to a collector, by HTTP or gRPC."""
