"""What each path takes and answers, in the forms of OpenAI's, Anthropic's, llama.cpp's and Mistral's APIs."""
