import logging

# torch warns about the registration of two enumerations in torchao 0.18 whenever transformers imports it, which users
# of this project cannot fix. Remove this with the release of torchao that registers them as torch 2.15 requires.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in str(record.msg))
