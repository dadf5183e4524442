"""Assistant turns generated anew by the target: what data_prep.responses is made of."""
