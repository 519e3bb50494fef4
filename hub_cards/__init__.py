"""Published repos: finding, fetching, checking and publishing drafters and backbones. One folder here is one repo."""
