// The Python module megatron.adaptive._C: decision log and RDMA devices. The channels are in
// node.cc. Only files in this folder include Python's headers.
//
// Blocking calls release the GIL. Waits return to Python about every 100 ms, so that signal
// handlers run. Exceptions of the core become the ones in megatron.adaptive.errors.
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

// Calls wait(deadline) without the GIL, in slices. Should be avoided if there is nothing to wait
// for, because getting the GIL back from a busy thread can take milliseconds.
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

// One end of a log. Only one thread may use it at a time.
template <typename Log>
struct End {
  explicit End(Log value) : log(std::move(value)) {}

  // Calls `try_now`, then `wait`. Throws DeadlineError with the text of `late`.
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
               " is " + std::to_string(log.capacity()) + " decisions behind, it is stuck or gone";
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
               ": the leader is stuck or gone";
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
          "Ends the log at once and wakes all who wait. Any thread; the first reason stays.")
      .def_property_readonly("abort_reason",
                             [](const End<Log>& self) { return self.log.abort_reason(); });
}

void bind_decision_log(py::module_& module) {
  bind_end<DecisionWriter>(module, "DecisionWriter", "The leader's end of a decision log.")
      .def("publish", &publish, py::arg("value"), py::arg("timeout_s"),
           R"(Appends a signed 64-bit integer for every reader.

Waits only while the slowest reader is `capacity` decisions behind, without the GIL, for at most
timeout_s seconds. One thread at a time. Raises DeadlineError; TransportError when the log was
closed or aborted.)")
      .def(
          "close", [](PyWriter& self) { self.log.close(); },
          "Ends the log in order: readers still get what was published. Any thread, repeatable.")
      .def_property_readonly("published", [](const PyWriter& self) { return self.log.published(); })
      .def_property_readonly(
          "fd", [](const PyWriter& self) { return self.log.fd(); },
          "Descriptor of the shared memory, for attach(); the writer keeps and closes it.");

  bind_end<DecisionReader>(module, "DecisionReader", "A follower's end of a decision log.")
      .def_property_readonly("position", [](const PyReader& self) { return self.log.position(); })
      .def("next", &next_of, py::arg("timeout_s"),
           R"(Returns the next decision, in the order of publication.

Waits without the GIL for at most timeout_s seconds. One thread at a time. Raises DeadlineError;
TransportError when the log was aborted, or closed with nothing left to read.)");

  py::class_<DecisionLog>(module, "DecisionLog", R"(One writer, N readers, a ring of decisions.)")
      .def_static(
          "create",
          [](std::uint32_t num_readers, std::uint32_t capacity, unsigned local_processes) {
            return std::make_unique<PyWriter>(
                DecisionWriter::create(num_readers, capacity, local_processes));
          },
          py::arg("num_readers"), py::arg("capacity"), py::arg("local_processes") = 0,
          R"(Makes a log and returns its DecisionWriter.

local_processes is how many busy processes share this node's CPUs (0: the writer and its readers);
with more of them than CPUs this process may use, waits sleep almost at once instead of spinning.
Processes pinned to a CPU each should therefore pass 1.)")
      .def_static(
          "attach",
          [](int fd, std::uint32_t reader_index, unsigned local_processes) {
            return std::make_unique<PyReader>(
                DecisionReader::attach(fd, reader_index, local_processes));
          },
          py::arg("fd"), py::arg("reader_index"), py::arg("local_processes") = 0,
          R"(Takes one reader's place in the log behind fd and returns its DecisionReader.

fd stays the caller's and may be closed afterwards. Raises TransportError when fd holds no decision
log of this version or the index is taken.)");
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
             "Every verbs device of this node with its ports and their states. Raises "
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
