"""Trains a model: process, loop, hooks, logging, measurement of layers."""
