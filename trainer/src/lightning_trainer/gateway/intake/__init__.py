"""Request bodies: bounded, read and parsed only after the key was checked."""
