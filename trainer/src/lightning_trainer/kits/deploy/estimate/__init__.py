"""What a candidate would earn, estimated from recorded calls of the stable policy before any user gets its answers."""
