// SPDX-License-Identifier: Apache-2.0
// lockstep's errors as Python exceptions: lockstep.Error and a class for each kind.
#include "lockstep/error.h"

#include <torch/csrc/Exceptions.h>

#include <map>

#include "bindings.h"
#include "lockstep/base/process/in_autograd.h"

namespace lockstep::python {
namespace {

constexpr const char* kDoc =
    "What lockstep raises. str() is the whole message; its parts are the attributes what, here, peer, likely and next.";

constexpr std::array kKinds = {"UsageError",  "EnvironmentError", "RendezvousError", "MismatchError",  "PeerLost",
                               "DeviceError", "DataError",        "CheckpointError", "NonFiniteError", "SystemError"};

constexpr std::pair<const char*, std::string ErrorText::*> kParts[] = {{"what", &ErrorText::what},
                                                                       {"here", &ErrorText::here},
                                                                       {"peer", &ErrorText::peer},
                                                                       {"likely", &ErrorText::likely},
                                                                       {"next", &ErrorText::next}};

// By kind; "" is their base. Never destroyed: the interpreter may be gone before.
std::map<std::string, PyObject*>& classes() {
  static auto* const all = new std::map<std::string, PyObject*>;
  return *all;
}

void set_python_error(const Error& error) {
  const auto found = classes().find(error.kind());
  const py::handle type = found != classes().end() ? found->second : classes().at("");
  const py::object instance = type(error.what());
  for (const auto& [name, part] : kParts) instance.attr(name) = error.text().*part;
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_python_error(error);
  }
}

PyObject* add_class(py::module_& module, const char* name, PyObject* base) {
  PyObject* const made = PyErr_NewExceptionWithDoc((std::string("lockstep.") + name).c_str(), kDoc, base, nullptr);
  module.attr(name) = py::handle(made);
  for (const auto& [part, _] : kParts) py::handle(made).attr(part) = "";
  return made;
}

// For hooks of autograd, which do not hold the GIL. An Error becomes a Python exception of its kind: autograd itself would
// make a RuntimeError of it.
void raising_in_python(const std::function<void()>& call) try { call(); } catch (const Error& error) {
  const py::gil_scoped_acquire gil;
  set_python_error(error);
  python_error raised;
  raised.persist();
  throw raised;  // NOLINT(misc-throw-by-value-catch-by-reference): a copy takes references of its own
}

}  // namespace

void bind_errors(py::module_& module) {
  PyObject* const base = classes()[""] = add_class(module, "Error", PyExc_RuntimeError);
  for (const char* kind : kKinds) classes()[kind] = add_class(module, kind, base);
  py::register_exception_translator(&translate);
  set_autograd_runner(&raising_in_python);
  const auto define = [&]<class Kind>(const char* name, std::type_identity<Kind>) {
    module.def(
        name,
        [](const std::string& what, const std::string& here, const std::string& likely, const std::string& next) {
          throw Kind({.what = what, .here = here, .likely = likely, .next = next});
        },
        py::arg("what"), py::kw_only(), py::arg("here") = "", py::arg("likely") = "", py::arg("next") = "");
  };
  define("usage_error", std::type_identity<UsageError>());
  define("mismatch_error", std::type_identity<MismatchError>());
}

}  // namespace lockstep::python
