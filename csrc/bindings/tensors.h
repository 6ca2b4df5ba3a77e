// torch tensors that use memory of channels. They are created with torch's table of C functions
// (DLPack's exchange API), without calls into Python. Older versions of torch do not have the
// table; for these, slower capsules are used.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"
#include "common/message.h"

namespace adaptive {

// Adds use_torch() to the module.
void bind_tensors(pybind11::module_& module);

// Device type and device number of memory, as in DLPack.
struct Place {
  int type = 1;  // host memory
  int id = 0;
};

// Fills in type, shape and size of `message`, and stores the address of a contiguous CPU tensor in
// `data`. Returns false for other tensors, for tensors whose elements differ from their memory
// (lazily conjugated complex numbers), and if torch does not have the table.
bool read_tensor(PyObject* tensor, Message& message, const void** data);

// Creates a tensor that uses the memory of `lease`. When the last view of the tensor is destroyed,
// the lease is returned, possibly on another thread and without the GIL. Throws std::runtime_error
// if use_torch() was not called before, and py::error_already_set.
pybind11::object make_tensor(Lease&& lease, const Message& message, Place place = {});

}  // namespace adaptive
