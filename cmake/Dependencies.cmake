# SPDX-License-Identifier: Apache-2.0
# The libraries that lockstep is built with. One message names all that are missing, and the packages that have them.
set(missing_on_debian "")
set(missing_on_fedora "")  # and on RHEL with EPEL

macro(lockstep_needs debian fedora found)
  if(NOT ${found})
    list(APPEND missing_on_debian ${debian})
    list(APPEND missing_on_fedora ${fedora})
  endif()
endmacro()

macro(lockstep_needs_package debian fedora name)
  find_package(${name} QUIET)
  lockstep_needs(${debian} ${fedora} ${name}_FOUND)
endmacro()

find_package(Threads REQUIRED)
lockstep_needs_package(libspdlog-dev spdlog-devel spdlog)
lockstep_needs_package(libfmt-dev fmt-devel fmt)
lockstep_needs_package(nlohmann-json3-dev json-devel nlohmann_json)
lockstep_needs_package(libssl-dev openssl-devel OpenSSL)
lockstep_needs_package(libcli11-dev cli11-devel CLI11)
if(LOCKSTEP_TORCH)
  lockstep_needs_package(zlib1g-dev zlib-devel ZLIB)
  lockstep_needs_package(libjpeg62-turbo-dev libjpeg-turbo-devel JPEG)
  lockstep_needs_package(libpng-dev libpng-devel PNG)
  find_library(XXHASH_LIBRARY xxhash)
  lockstep_needs(libxxhash-dev xxhash-devel XXHASH_LIBRARY)
  find_path(LOCKSTEP_GLOO_HEADERS gloo/transport/device.h)  # libtorch has Gloo, but not its headers
  lockstep_needs(libgloo-dev gloo LOCKSTEP_GLOO_HEADERS)
  find_file(LOCKSTEP_CHART_JS_FILE chart.min.js PATHS /usr/share/javascript/chart.js NO_DEFAULT_PATH)  # draws in reports
  lockstep_needs(libjs-chart.js chart.min.js LOCKSTEP_CHART_JS_FILE)
endif()
if(LOCKSTEP_GLOO_HEADERS)
  include_directories(SYSTEM ${LOCKSTEP_GLOO_HEADERS})
endif()
if(missing_on_debian)
  list(JOIN missing_on_debian " " missing_on_debian)
  list(JOIN missing_on_fedora " " missing_on_fedora)
  message(FATAL_ERROR "lockstep: libraries to build it with are missing.\n"
    "  next: Debian, Ubuntu: apt-get install ${missing_on_debian}\n"
    "        Fedora, RHEL with EPEL: dnf install ${missing_on_fedora}\n"
    "        (no packages there: gloo, whose headers are at github.com/pytorch/gloo: -DLOCKSTEP_GLOO_HEADERS=FOLDER;\n"
    "        chart.min.js of Chart.js 3: -DLOCKSTEP_CHART_JS_FILE=FILE)")
endif()
