"""The answers of the viewer's interface. FastAPI describes these records; the pages' types are generated from that."""
