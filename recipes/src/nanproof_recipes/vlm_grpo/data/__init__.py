"""The data of vlm-grpo: `scenes` of coloured shapes with a mask, and `pictures` of them."""
