"""Model servers behind the gateway: their protocols, their failures, and the choice of a replica."""
