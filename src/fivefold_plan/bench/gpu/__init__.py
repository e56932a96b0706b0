"""`fivefold bench gpu`: a short examination of one machine's GPUs, part by part, beside what is expected of them."""
