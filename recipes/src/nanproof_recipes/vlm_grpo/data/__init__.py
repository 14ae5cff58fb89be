"""The data of vlm-grpo: `scenes` makes coloured shapes with a mask and a caption, `pictures` writes them as PNG files."""
