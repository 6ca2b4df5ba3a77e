// A received message as a Python object, and memory as DLPack capsules.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"

namespace adaptive {

// Adds the type `Arrival` to the module; to be called before the function below.
void bind_arrival(pybind11::module_& module);

// A new `Arrival`. Throws py::error_already_set.
pybind11::object make_arrival(Arrival&& arrival);

// Where memory is, as DLPack has it.
struct Place {
  int type = 1;  // the host's
  int id = 0;
};

// A capsule "dltensor" over the memory of `lease`, which is given back, from any thread and without
// the GIL, when whoever takes the capsule is done. Throws Error for a message without a DLPack
// form.
pybind11::object make_dlpack(Lease&& lease, const Message& message, Place place = {});

}  // namespace adaptive
