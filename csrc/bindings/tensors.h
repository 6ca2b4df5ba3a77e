// Tensors of torch over memory of channels. Through the table of C functions that torch offers to
// others (DLPack's exchange API) without a call into Python in between; older versions of torch
// have none, and take capsules, more slowly.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"
#include "common/message.h"

namespace adaptive {

// Adds use_torch() to the module.
void bind_tensors(pybind11::module_& module);

// Where memory is, as DLPack has it.
struct Place {
  int type = 1;  // the host's
  int id = 0;
};

// Fills in type, shape and size of `message` and finds the memory of a contiguous CPU tensor. False
// for any other, where elements may not be what the memory holds (complex numbers that are to be
// conjugated), and without the table.
bool read_tensor(PyObject* tensor, Message& message, const void** data);

// A new tensor over the memory of `lease`, which is given back, from any thread and without the
// GIL, when the last view of it is gone. Throws std::runtime_error before use_torch(),
// py::error_already_set.
pybind11::object make_tensor(Lease&& lease, const Message& message, Place place = {});

}  // namespace adaptive
