"""SAEs and analyses for the Hugging Face Hub: a model, a data set and a page, each with a card written from facts."""
