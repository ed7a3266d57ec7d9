"""SAEs to and from other toolkits: folders as sae_lens reads and writes them."""
