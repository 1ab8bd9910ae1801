"""What the stages hand each other, a module per stage that writes it: table schemas, JSON models, and their files."""
