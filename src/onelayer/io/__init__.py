"""Layers in and out: safetensors files, torch modules, pretrained models."""
