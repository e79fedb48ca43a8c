# SPDX-License-Identifier: Apache-2.0
# Scripts that start the command and other programs as a user does.
set(here ${CMAKE_CURRENT_SOURCE_DIR})
set(command $<TARGET_FILE:lockstep_command>)

lockstep_check(command.full_disk 300 ${here}/train/full_disk_test.sh ${command})

# A checkpoint folder with foreign files, kills, and disks that are full or fail; LOCKSTEP_FOLDER_FUZZ makes it longer.
add_executable(folder_program checkpoint_folder/folder_program.cc)
target_link_libraries(folder_program PRIVATE lockstep)
target_precompile_headers(folder_program REUSE_FROM lockstep_pch)
lockstep_check(checkpoint.folder_fuzz 14400 ${Python3_EXECUTABLE} ${here}/checkpoint_folder/fuzz.py $<TARGET_FILE:folder_program>)

# Several machines, as network namespaces.
add_library(drifting_clock MODULE hosts/drifting_clock.cc)
add_executable(pattern_ranks security/pattern_ranks.cc)
target_link_libraries(pattern_ranks PRIVATE lockstep)
target_precompile_headers(pattern_ranks REUSE_FROM lockstep_pch)
lockstep_check(hosts.two_hosts_train_as_one_rank_does 120 ${here}/hosts/two_hosts_test.sh ${command} $<TARGET_FILE:drifting_clock>)
set(MPI_EXECUTABLE_SUFFIX .openmpi)
find_package(MPI COMPONENTS CXX)  # tools/setup.sh check installs it
if(MPI_CXX_FOUND)
  foreach(program from_mpi from_mpi_by_hand)
    add_executable(${program} ${PROJECT_SOURCE_DIR}/examples/from_mpi.cc)
    target_link_libraries(${program} PRIVATE lockstep MPI::MPI_CXX)
  endforeach()
  target_compile_definitions(from_mpi_by_hand PRIVATE BY_HAND)
endif()
lockstep_check(hosts.ranks_find_each_other 300 ${here}/hosts/launchers_test.sh ${command} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
lockstep_check(hosts.membership 600 ${here}/hosts/membership_test.sh ${command})
lockstep_check(hosts.ssh 300 ${here}/hosts/ssh_test.sh ${command})
lockstep_check(hosts.lost_machine 300 ${here}/hosts/lost_machine_test.sh ${command})
lockstep_check(hosts.bad_links 300 ${here}/hosts/bad_links_test.sh ${command} $<TARGET_FILE:misbehaving_task>)
lockstep_check(hosts.lost_stage 300 ${here}/hosts/lost_stage_test.sh ${command} $<TARGET_FILE:misbehaving_task>)
lockstep_check(hosts.slurm 300 ${here}/hosts/slurm_test.sh ${command})
lockstep_check(hosts.compare 300 ${here}/hosts/compare_test.sh ${command})
lockstep_check(hosts.security 300 ${here}/security/network_test.sh ${command})
lockstep_check(hosts.munge 300 ${here}/security/munge_test.sh ${command})
lockstep_check(hosts.fuzz 3600 ${here}/security/fuzz_test.sh ${command})
lockstep_check(hosts.security_of_tensors 120 ${here}/security/tensors_test.sh ${command} $<TARGET_FILE:pattern_ranks>)

# What others read: TensorBoard, the safetensors package, Perfetto, headless Chromium.
lockstep_check(command.curves_are_what_tensorboard_reads 300 ${Python3_EXECUTABLE} ${here}/tensorboard_test.py ${command})
lockstep_check(command.checkpoints_are_what_safetensors_reads 300 ${Python3_EXECUTABLE} ${here}/safetensors_test.py ${command})
lockstep_check(command.a_trace_shows_what_every_rank_does 300 ${Python3_EXECUTABLE} ${here}/trace_test.py ${command}
  $<TARGET_FILE:misbehaving_task> $<TARGET_FILE:unusual_loop>)
lockstep_check(command.a_report_shows_what_runs_did 300 ${Python3_EXECUTABLE} ${here}/report_test.py ${command})
lockstep_check(command.top_beside_training 300 ${Python3_EXECUTABLE} ${here}/top_test.py --train ${command} $<TARGET_FILE:slow_lenet>)
