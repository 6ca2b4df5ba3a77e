// A received message as a Python object, and memory as DLPack capsules.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"

namespace adaptive {

// Adds the type `Arrival` to the module; to be called before the function below.
void bind_arrival(pybind11::module_& module);

// As what a node's arrivals are handed to Python.
struct ArrivalForm {
  pybind11::object type;  // `Arrival`, or a subclass of it
  long least_free = 0;    // with fewer free slots take() copies
  bool direct = false;    // take() makes tensors by itself, without asking the subclass
};

// The form of a node that was told of none.
ArrivalForm plain_arrivals();

// Throws py::type_error where `type` is no subclass of `Arrival`.
void check_arrival_type(const pybind11::object& type);

// A new object of that form. Throws py::error_already_set.
pybind11::object make_arrival(Arrival&& arrival, const ArrivalForm& form);

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
