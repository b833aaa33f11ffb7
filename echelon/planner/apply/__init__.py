"""Execution of plans that a search found: conversion of a Draft to a Plan, saved plans, ``auto``, and trials."""
