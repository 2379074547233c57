"""Write train.jsonl and val.jsonl: messages of customers, and what each is about."""

import json

ABOUT = {
    "refund": ["I want my money back for the {}.", "Please refund the {}.", "The {} broke. Can I get a refund?"],
    "delivery": ["Where is my {}?", "My {} has not arrived.", "When will the {} be delivered?"],
    "account": ["I can't log in to see my {}.", "Which email has my {} account?", "Delete my account and the {}."],
}
THINGS = ["lamp", "phone", "book", "chair", "camera", "bicycle", "radio", "jacket"]


def write(name, things):
    with open(name, "w") as file:
        for thing in things:
            for kind, texts in ABOUT.items():
                for text in texts:
                    file.write(json.dumps({"message": text.format(thing), "kind": kind}) + "\n")


write("train.jsonl", THINGS[:6])
write("val.jsonl", THINGS[6:])
