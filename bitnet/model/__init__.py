"""The network: what it computes, on one device or several."""
