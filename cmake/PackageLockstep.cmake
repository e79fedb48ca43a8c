# SPDX-License-Identifier: Apache-2.0
# cpack -G DEB: the command, the library and its headers as a package of Debian. It has no torch, which Debian has in
# another version; the description says where it is to be.
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_CONTACT lockstep)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_SOURCE_DIR}/dist)
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL lockstep)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "python3 (>= 3.10)")  # besides those of SHLIBDEPS
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "python3-pip, dataset-fashion-mnist")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "${PROJECT_DESCRIPTION}\n\
It needs libtorch ${LOCKSTEP_TORCH_VERSION} out of PyPI's wheel, as /usr/lib/lockstep/torch:\n\
pip install --no-deps --target /usr/lib/lockstep torch==${LOCKSTEP_TORCH_VERSION}.* \
nvidia-cuda-runtime==13.* nvidia-cuda-cupti==13.*")
include(CPack)
