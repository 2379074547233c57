"""Model servers behind the gateway: what they speak, how they fail, which replica answers."""
