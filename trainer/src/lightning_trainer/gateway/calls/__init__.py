"""One model call in the gateway: answered, recorded, sent back."""
