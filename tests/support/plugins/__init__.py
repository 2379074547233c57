"""What instrumented clients send and receive."""
