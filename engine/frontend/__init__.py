"""HTTP and text: what clients see. Knows tokens only as numbers to send to the leader."""
