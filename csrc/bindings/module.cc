// The Python module megatron.adaptive._C: the decision log and the list of RDMA devices. The
// channels are in node.cc. Only files in this folder include Python's headers.
//
// Blocking calls release the GIL. Waits return to Python about every 100 ms, so that signal
// handlers run. The core's exceptions are converted to the classes in megatron.adaptive.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bindings/python.h"
#include "common/deadline.h"
#include "common/error.h"
#include "rdma/devices.h"
#include "shm/decision_log.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Must be increased by one for every change that Python code needs to know about; see extension.py.
constexpr int kInterface = 6;

// Calls wait(deadline) repeatedly, each time for a short slice without the GIL. Callers should
// first try without waiting, because getting the GIL back from a busy thread can take milliseconds.
template <typename Wait>
WaitStatus wait_in_slices(double timeout_s, const Wait& wait) {
  const Deadline deadline = deadline_after(timeout_s);
  for (;;) {
    WaitStatus status;
    {
      const py::gil_scoped_release release;
      status = wait(deadline.at_most(kSlice));
    }
    if (status != WaitStatus::kNotYet || deadline.expired()) {
      return status;
    }
    run_signal_handlers();
  }
}

// One end of a decision log. Only one thread at a time may use it.
template <typename Log>
struct End {
  explicit End(Log value) : log(std::move(value)) {}

  // Calls `try_now`, and then `wait` if nothing was ready. If nothing is ready after `timeout_s`,
  // throws DeadlineError with the text that `late` returns.
  template <typename TryNow, typename Wait, typename Late>
  void act(double timeout_s, const TryNow& try_now, const Wait& wait, const Late& late) {
    const Busy guard(busy, "use one end of a decision log");
    WaitStatus status = try_now();
    if (status == WaitStatus::kNotYet) {
      status = wait_in_slices(timeout_s, wait);
    }
    if (status == WaitStatus::kNotYet) {
      throw DeadlineError(late());
    }
    if (status == WaitStatus::kAborted) {
      throw Error("the decision log was aborted with reason code " +
                  std::to_string(log.abort_reason().value_or(0)));
    }
    if (status == WaitStatus::kClosed) {
      throw Error("the decision log is closed");
    }
  }

  Log log;
  bool busy = false;
};

using PyWriter = End<DecisionWriter>;
using PyReader = End<DecisionReader>;

void publish(PyWriter& end, std::int64_t value, double timeout_s) {
  DecisionWriter& log = end.log;
  end.act(
      timeout_s, [&] { return log.try_publish(value); },
      [&](const Deadline& deadline) { return log.publish(value, deadline); },
      [&] {
        return "decision " + std::to_string(log.published()) + " could not be published within " +
               seconds_text(timeout_s) + ": reader " + std::to_string(log.slowest_reader()) +
               " is " + std::to_string(log.capacity()) +
               " decisions behind; it hangs or has exited";
      });
}

std::int64_t next_of(PyReader& end, double timeout_s) {
  DecisionReader& log = end.log;
  std::int64_t value = 0;
  end.act(
      timeout_s, [&] { return log.try_next(value); },
      [&](const Deadline& deadline) { return log.next(value, deadline); },
      [&] {
        return "decision " + std::to_string(log.position()) + " did not reach reader " +
               std::to_string(log.index()) + " within " + seconds_text(timeout_s) +
               ": the leader hangs or has exited";
      });
  return value;
}

// Methods that both ends have.
template <typename Log>
py::class_<End<Log>> bind_end(py::module_& module, const char* name, const char* words) {
  return py::class_<End<Log>>(module, name, words)
      .def(
          "abort", [](End<Log>& self, std::uint32_t code) { self.log.abort(code); },
          py::arg("reason_code"),
          "Aborts the log and wakes all waiting threads. May be called from any thread. Only the "
          "first reason is kept.")
      .def_property_readonly("abort_reason",
                             [](const End<Log>& self) { return self.log.abort_reason(); });
}

void bind_decision_log(py::module_& module) {
  bind_end<DecisionWriter>(module, "DecisionWriter", "The leader's end of a decision log.")
      .def("publish", &publish, py::arg("value"), py::arg("timeout_s"),
           R"(Appends a signed 64-bit integer for every reader.

Waits only while the slowest reader is `capacity` decisions behind, without the GIL, for at most
timeout_s seconds. One thread at a time. Raises DeadlineError, and TransportError if the log was
closed or aborted.)")
      .def(
          "close", [](PyWriter& self) { self.log.close(); },
          "Closes the log. Readers still get all published values. May be called from any thread, "
          "and repeatedly.")
      .def_property_readonly("published", [](const PyWriter& self) { return self.log.published(); })
      .def_property_readonly(
          "fd", [](const PyWriter& self) { return self.log.fd(); },
          "Descriptor of the shared memory for attach(). The writer owns it.");

  bind_end<DecisionReader>(module, "DecisionReader", "A follower's end of a decision log.")
      .def_property_readonly("position", [](const PyReader& self) { return self.log.position(); })
      .def("next", &next_of, py::arg("timeout_s"),
           R"(Returns the next decision, in the order of publication.

Waits without the GIL for at most timeout_s seconds. One thread at a time. Raises DeadlineError;
TransportError if the log was aborted, or closed and completely read.)");

  py::class_<DecisionLog>(module, "DecisionLog", R"(One writer, N readers, a ring of decisions.)")
      .def_static(
          "create",
          [](std::uint32_t num_readers, std::uint32_t capacity, unsigned local_processes) {
            return std::make_unique<PyWriter>(
                DecisionWriter::create(num_readers, capacity, local_processes));
          },
          py::arg("num_readers"), py::arg("capacity"), py::arg("local_processes") = 0,
          R"(Creates a log and returns its DecisionWriter.

local_processes is the number of busy processes that share this node's CPUs (0: the writer and its
readers). If this process may use fewer CPUs, waits spin only briefly before they sleep. Processes
that are pinned to one CPU each should therefore pass 1.)")
      .def_static(
          "attach",
          [](int fd, std::uint32_t reader_index, unsigned local_processes) {
            return std::make_unique<PyReader>(
                DecisionReader::attach(fd, reader_index, local_processes));
          },
          py::arg("fd"), py::arg("reader_index"), py::arg("local_processes") = 0,
          R"(Opens the log in fd as the given reader and returns its DecisionReader.

The caller owns fd and may close it afterwards. Raises TransportError if fd is not a decision log of
this version, or if the index is already used.)");
}

void bind_rdma(py::module_& module) {
  py::class_<RdmaPort>(module, "RdmaPort")
      .def_readonly("number", &RdmaPort::number)
      .def_readonly("state", &RdmaPort::state);
  py::class_<RdmaDevice>(module, "RdmaDevice")
      .def_readonly("name", &RdmaDevice::name)
      .def_readonly("ports", &RdmaDevice::ports);
  module.attr("built_with_rdma") = built_with_rdma();
  module.def("rdma_devices", &list_rdma_devices, py::call_guard<py::gil_scoped_release>(),
             "Returns all verbs devices of this node with their ports and states. Raises "
             "TransportError in a build without RDMA.");
}

// Translates only the core's own exceptions; pybind11 translates the others.
void translate(std::exception_ptr thrown) {
  if (!thrown) {
    return;
  }
  try {
    std::rethrow_exception(thrown);
  } catch (const Error&) {
    set_python_error(std::current_exception());
  }
}

}  // namespace
}  // namespace adaptive

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native parts of megatron.adaptive; load it through megatron.adaptive.extension.";
  module.attr("INTERFACE") = adaptive::kInterface;
  py::register_local_exception_translator(&adaptive::translate);
  adaptive::bind_decision_log(module);
  adaptive::bind_rdma(module);
  adaptive::bind_transport(module);
}
