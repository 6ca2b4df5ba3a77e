// A received message as a Python object.
#pragma once

#include "bindings/python.h"
#include "common/completions.h"

namespace adaptive {

// Adds the type `Arrival` to the module. Must be called before the other functions in this file.
void bind_arrival(pybind11::module_& module);

// How a node returns its arrivals to Python.
struct ArrivalForm {
  pybind11::object type;  // `Arrival`, or a subclass of it
  long least_free = 0;    // take() copies if fewer slots are free
};

// The default.
ArrivalForm plain_arrivals();

// Throws py::type_error if `type` is not a subclass of `Arrival`.
void check_arrival_type(const pybind11::object& type);

// Returns a new object. Throws py::error_already_set.
pybind11::object make_arrival(Arrival&& arrival, const ArrivalForm& form);

}  // namespace adaptive
