"""The pages: HTML files that open with no network, rendered from templates."""
