"""The master of a node: supervises children, hears the queue, decides who gets what. Never talks to central control."""
