"""What the viewer's interface answers with. FastAPI describes these records; the pages' types are made of that."""
