import logging

# torch warns of how torchao 0.18 registers two enumerations, whenever transformers imports it: nothing that users of
# this project can mend. Falls with the release of torchao that registers them as torch 2.15 asks for.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in str(record.msg))
