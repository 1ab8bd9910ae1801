import pytest

from aqnpipe.models.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def save_model(tmp_path_factory, make_model):
    """Returns a function that writes a small random model with the built-in tokenizer, and gives its folder."""

    def save(num_layers):
        folder = tmp_path_factory.mktemp("model")
        tokenizer = build_tokenizer()
        make_model(
            num_layers=num_layers,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
