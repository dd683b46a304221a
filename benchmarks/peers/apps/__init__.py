"""The peers' side. Runs in the peers' own environment and knows nothing of the product."""
