"""What workers and servers send each other: messages, requests, connections."""
