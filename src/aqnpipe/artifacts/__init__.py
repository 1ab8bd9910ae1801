"""Files exchanged between stages: table schemas, JSON models, and how they are read and written. A module per stage."""
