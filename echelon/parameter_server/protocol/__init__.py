"""The protocol between workers and servers: messages, requests, connections."""
