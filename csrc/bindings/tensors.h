// torch tensors that use memory of channels. They are created with torch's table of C functions
// (DLPack's exchange API) without calls into Python. Older versions of torch do not have the table
// and use capsules, which are slower.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"
#include "common/message.h"

namespace adaptive {

// Adds use_torch() to the module.
void bind_tensors(pybind11::module_& module);

// Location of memory, as in DLPack.
struct Place {
  int type = 1;  // host memory
  int id = 0;
};

// Fills in type, shape and size of `message`, and finds the memory of a contiguous CPU tensor.
// Returns false for other tensors, for tensors whose elements differ from their memory (lazily
// conjugated complex numbers), and without the table.
bool read_tensor(PyObject* tensor, Message& message, const void** data);

// Creates a tensor that uses the memory of `lease`. The lease is returned, from any thread and
// without the GIL, when the last view of the tensor is destroyed. Throws std::runtime_error before
// use_torch(), and py::error_already_set.
pybind11::object make_tensor(Lease&& lease, const Message& message, Place place = {});

}  // namespace adaptive
