#include "bindings/python.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>

namespace py = pybind11;

namespace adaptive {
namespace {

constexpr double kLongestWaitS = 1e8;

void raise_as(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("megatron.adaptive.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

// The handlers are ordered from derived to base classes.
void set_error_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const DeadlineError& error) {
    raise_as("DeadlineError", error);
  } catch (const PeerLostError& error) {
    raise_as("PeerLostError", error);
  } catch (const Error& error) {
    raise_as("TransportError", error);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

Deadline deadline_after(double timeout_s) {
  if (!(timeout_s >= 0.0 && timeout_s <= kLongestWaitS)) {
    throw std::invalid_argument("timeout_s " + std::to_string(timeout_s) +
                                " must be within 0 and 1e8");
  }
  return Deadline::after(std::chrono::nanoseconds(std::llround(timeout_s * 1e9)));
}

Deadline deadline_at(double monotonic_s) noexcept {
  constexpr double kNeverS = 9e9;  // limit of the clock's 64-bit nanoseconds
  const double when_s = monotonic_s >= 0.0 ? std::min(monotonic_s, kNeverS) : 0.0;
  return Deadline::at(Deadline::Clock::time_point(
      std::chrono::nanoseconds(static_cast<std::int64_t>(when_s * 1e9))));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

void run_signal_handlers() {
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void set_python_error(std::exception_ptr thrown) noexcept {
  try {
    set_error_of(thrown);
  } catch (py::error_already_set& error) {  // errors.py itself cannot be imported
    error.restore();
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an error of the C++ extension has no Python class");
  }
}

}  // namespace adaptive
