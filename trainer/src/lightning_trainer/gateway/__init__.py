"""The training side's one ASGI app: gateway, OTLP receiver, queue of rollouts, keys."""
